// What Python code sees of compiled functions, beyond what mypyc makes of them. The build hook compiles this file beside
// mypyc's C files, and inserts an include of python_surface.h into those.
//
// 1. An argument of a wrong type raises InvalidTypeError with the argument's name, and an integer that is not an int
//    (NumPy's) is accepted where an int is declared. Only the path that raised TypeError before is longer.
// 2. Methods, functions, properties and classes have the docstring, signature and annotations of their source.
//    They are looked up by kv_pool/documentation.py when they are first read; importing costs a new type pointer for
//    each function.
// 3. A call from Python with the usual arguments is cheaper, since one of a bound method costs more by 2. This part is
//    in python_surface.h.

#include "CPy.h"

// ---- 1. arguments ---------------------------------------------------------------------------------

static PyObject *KVPool_CallArguments(const char *function, const char *format, const char *text, const char *name,
                                      PyObject *value) {
    PyObject *arguments = PyImport_ImportModule("kv_pool.core.arguments");
    if (arguments == NULL)
        return NULL;
    PyObject *result = PyObject_CallMethod(arguments, function, format, name, value, text);
    Py_DECREF(arguments);
    return result;
}

// mypyc names the C variable of the argument `x` obj_x; other variables are casts inside a function.
void KVPool_TypeError(const char *expected, const char *variable, PyObject *value) {
    if (strncmp(variable, "obj_", 4) != 0 || strcmp(variable, "obj_self") == 0) {
        CPy_TypeError(expected, value);
        return;
    }
    PyErr_Clear(); // of a conversion to float
    Py_XDECREF(KVPool_CallArguments("refuse_type", "sOs", expected, variable + 4, value));
}

// The result is borrowed, as that of CPyTagged_BorrowFromObject is: it is never a heap object. *is_wrong for an error.
CPyTagged KVPool_TakeInt(const char *name, PyObject *value, int *is_wrong) {
    CPyTagged tagged = CPY_INT_TAG;
    PyObject *number = KVPool_CallArguments("as_small_int", "sOs", "int", name, value);
    if (number != NULL) {
        tagged = CPyTagged_BorrowFromObject(number);
        Py_DECREF(number);
    }
    *is_wrong = number == NULL;
    return tagged;
}

// ---- 2. documentation -----------------------------------------------------------------------------

static PyObject *KVPool_Describe(PyObject *object, const char *attribute) {
    PyObject *documentation = PyImport_ImportModule("kv_pool.documentation");
    if (documentation == NULL)
        return NULL;
    PyObject *found = PyObject_CallMethod(documentation, "describe", "Os", object, attribute);
    Py_DECREF(documentation);
    return found;
}

static PyObject *KVPool_GetDescribed(PyObject *self, void *attribute) { return KVPool_Describe(self, attribute); }

static PyGetSetDef KVPool_function_getset[] = {
    {"__doc__", KVPool_GetDescribed, NULL, NULL, "__doc__"},
    {"__signature__", KVPool_GetDescribed, NULL, NULL, "__signature__"},
    {"__annotations__", KVPool_GetDescribed, NULL, NULL, "__annotations__"},
    {"__globals__", KVPool_GetDescribed, NULL, NULL, "__globals__"}, // where typing.get_type_hints finds names
    {NULL},
};

// Bound as a Python function is, so that a bound method has these attributes, too.
static PyObject *KVPool_BindMethod(PyObject *self, PyObject *object, PyObject *type) {
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

// How a method is called: CPython's own way for methods of built-in types checks the type of `self`, and counts the
// depth of recursion. mypyc's functions check `self` themselves, and Python's frames below count.
static PyObject *KVPool_CallMethod(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    PyMethodDef *method = ((PyMethodDescrObject *)self)->d_method;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    if (nargs < 1) {
        PyErr_Format(PyExc_TypeError, "unbound method %s() needs an argument", method->ml_name);
        return NULL;
    }
    typedef PyObject *(*Function)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
    return ((Function)(void (*)(void))method->ml_meth)(args[0], args + 1, nargs - 1, kwnames);
}

// These types add attributes to objects that Python has made of its own types: they have the same size and slots.
static PyTypeObject KVPool_Method = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kv_pool.compiled_method",
    .tp_basicsize = sizeof(PyMethodDescrObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_getset = KVPool_function_getset,
    .tp_descr_get = KVPool_BindMethod,
};

static PyTypeObject KVPool_Function = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kv_pool.compiled_function",
    .tp_basicsize = sizeof(PyCFunctionObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_getset = KVPool_function_getset,
};

static PyGetSetDef KVPool_property_getset[] = {
    {"__doc__", KVPool_GetDescribed, NULL, NULL, "__doc__"},
    {NULL},
};

static PyTypeObject KVPool_Property = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kv_pool.compiled_property",
    .tp_basicsize = sizeof(PyGetSetDescrObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_getset = KVPool_property_getset,
};

// An attribute of a class that is computed when it is read.
typedef struct {
    PyObject_HEAD
    PyTypeObject *owner; // borrowed; compiled classes live as long as the process
    const char *attribute;
} KVPool_ClassAttributeObject;

static PyObject *KVPool_GetClassAttribute(PyObject *self, PyObject *object, PyObject *type) {
    KVPool_ClassAttributeObject *lazy = (KVPool_ClassAttributeObject *)self;
    PyTypeObject *reader = type == NULL ? Py_TYPE(object) : (PyTypeObject *)type;
    if (strcmp(lazy->attribute, "__signature__") == 0 &&
        (object != NULL || reader->tp_init != lazy->owner->tp_init)) { // a subclass with a constructor of its own
        PyErr_SetString(PyExc_AttributeError, lazy->attribute);
        return NULL;
    }
    return KVPool_Describe((PyObject *)lazy->owner, lazy->attribute);
}

static PyTypeObject KVPool_ClassAttribute = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kv_pool.class_attribute",
    .tp_basicsize = sizeof(KVPool_ClassAttributeObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_descr_get = KVPool_GetClassAttribute,
};

static int KVPool_SetClassAttribute(PyTypeObject *owner, const char *attribute) {
    KVPool_ClassAttributeObject *lazy = PyObject_New(KVPool_ClassAttributeObject, &KVPool_ClassAttribute);
    if (lazy == NULL)
        return -1;
    lazy->owner = owner;
    lazy->attribute = attribute;
    int rv = PyDict_SetItemString(owner->tp_dict, attribute, (PyObject *)lazy);
    Py_DECREF(lazy);
    return rv;
}

static int KVPool_DocumentClass(PyTypeObject *type) {
    PyObject *name, *member;
    Py_ssize_t position = 0;
    while (PyDict_Next(type->tp_dict, &position, &name, &member)) {
        if (Py_TYPE(member) == &PyMethodDescr_Type) {
            Py_SET_TYPE(member, &KVPool_Method);
            if (((PyMethodDescrObject *)member)->d_method->ml_flags == (METH_FASTCALL | METH_KEYWORDS))
                ((PyMethodDescrObject *)member)->vectorcall = KVPool_CallMethod;
        } else if (Py_TYPE(member) == &PyGetSetDescr_Type)
            Py_SET_TYPE(member, &KVPool_Property);
    }
    if (KVPool_SetClassAttribute(type, "__doc__") < 0 || KVPool_SetClassAttribute(type, "__signature__") < 0)
        return -1;
    if (PyDict_GetItemString(type->tp_dict, "__annotations__") != NULL && // mypyc's say `type` for most
        KVPool_SetClassAttribute(type, "__annotations__") < 0)
        return -1;
    PyType_Modified(type);
    return 0;
}

static int KVPool_ReadyType(PyTypeObject *type, PyTypeObject *base) {
    if (type->tp_flags & Py_TPFLAGS_READY)
        return 0;
    type->tp_base = base;
    type->tp_vectorcall_offset = base == NULL ? 0 : base->tp_vectorcall_offset;
    return PyType_Ready(type);
}

// Document what a module has defined. `globals` is its dict, after its code has run.
int KVPool_Document(PyObject *globals) {
    if (KVPool_ReadyType(&KVPool_Method, &PyMethodDescr_Type) < 0 ||
        KVPool_ReadyType(&KVPool_Function, &PyCFunction_Type) < 0 ||
        KVPool_ReadyType(&KVPool_Property, &PyGetSetDescr_Type) < 0 ||
        KVPool_ReadyType(&KVPool_ClassAttribute, NULL) < 0)
        return -1;
    PyObject *module_name = PyDict_GetItemString(globals, "__name__");
    PyObject *name, *object;
    Py_ssize_t position = 0;
    while (PyDict_Next(globals, &position, &name, &object)) {
        int is_class = PyType_Check(object);
        if (!is_class && Py_TYPE(object) != &PyCFunction_Type)
            continue;
        PyObject *module = is_class ? PyDict_GetItemString(((PyTypeObject *)object)->tp_dict, "__module__")
                                    : ((PyCFunctionObject *)object)->m_module;
        if (module == NULL || !PyUnicode_Check(module) || PyUnicode_Compare(module, module_name) != 0)
            continue; // imported
        if (!is_class)
            Py_SET_TYPE(object, &KVPool_Function);
        else if (PyDict_GetItemString(((PyTypeObject *)object)->tp_dict, "__mypyc_attrs__") != NULL) {
            if (KVPool_DocumentClass((PyTypeObject *)object) < 0)
                return -1;
        } else { // a class that mypyc leaves to Python, such as a NamedTuple; it loses the docstring only
            if (KVPool_SetClassAttribute((PyTypeObject *)object, "__doc__") < 0)
                return -1;
            PyType_Modified((PyTypeObject *)object);
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}
